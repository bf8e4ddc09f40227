"""Everything a run is told, checked before torch is imported. Numbers and paths only."""
