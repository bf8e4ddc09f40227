"""The video autoencoders of Wan 2.1 and 2.2: layers, row parallelism over ranks, tiled decoding.

Parameter names and results are those of diffusers' AutoencoderKLWan.
"""
