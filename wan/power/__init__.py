"""Evaluation of FA_Power_Cap: trace reports, comparisons of modes, predictions."""
