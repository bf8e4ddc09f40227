"""What a run exchanges and what memory it takes, before it is run."""
