"""The device check: `steps` (the table of steps and the report), `process` (a step in a process of
its own, which may hang or crash), `bench` (what steps measure with). The other files are the steps,
one subject each. Steps use the classes of `wan` that a run uses, never versions of their own.
"""
