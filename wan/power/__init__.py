"""What evidence shows of FA_Power_Cap: reports, comparisons of modes, predictions."""
