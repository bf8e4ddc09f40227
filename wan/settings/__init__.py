"""What a run is told, as frozen and checked values. No torch."""
