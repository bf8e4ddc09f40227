"""A resident model behind an HTTP interface: `python -m wan.serve`.

One process, the front, speaks HTTP, keeps the journal and the files, and starts the ranks; it never
joins a collective. The ranks are a group of torchrun that make one video after the other, as
`--prompt_file` does.
"""
