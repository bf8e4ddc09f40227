"""HTTP server for video generation with a model that stays loaded: `python -m wan.serve`.

The front process handles HTTP, the journal and the files, and starts the ranks; it never joins a
collective. The ranks are a torchrun group that generates the videos, one after the other
or in batches by expert.
"""
