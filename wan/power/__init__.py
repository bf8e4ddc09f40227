"""Evidence of FA_Power_Cap: meters, schedule reports, comparisons of modes, predictions."""
