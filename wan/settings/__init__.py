"""Settings of a run as frozen dataclasses of checked values. Does not import torch."""
