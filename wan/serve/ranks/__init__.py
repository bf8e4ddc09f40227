"""The ranks that generate the videos: their program, and their group as the front sees it."""
