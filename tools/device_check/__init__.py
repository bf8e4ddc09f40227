"""The device check: `steps` (table of steps and report), `process` (worker processes, which may
hang or crash), `bench` (measurements and references for the steps). The other files are the steps,
one subject each. Steps use the same classes of `wan` as a run, never copies of them.
"""
