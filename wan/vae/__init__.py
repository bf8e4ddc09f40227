"""The video autoencoders of Wan 2.1 and 2.2: their layers, the rows that ranks share, tiles.

Parameters have the names of diffusers' AutoencoderKLWan, whose results these networks give.
"""
