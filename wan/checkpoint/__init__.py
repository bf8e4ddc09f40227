"""From a folder to tensors in a network: layout (what is there), files, keymaps, quantised, load.

Only `load` imports torch; nothing here knows a network's class.
"""
