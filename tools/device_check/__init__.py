"""The device check, read downwards: `command` (the story), `steps` (the list and what a step says),
`supervise` (a step in a process that may hang or crash), `agree` (ranks), `worker` (that process),
`report` (table, JSON). `bench` has what steps measure with; the other files are the steps, one
subject each. Steps use the classes of `wan` that a run uses, never versions of their own.
"""
