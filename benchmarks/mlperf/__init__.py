"""The text-to-video workload of MLPerf Inference. It is MLPerf-shaped, not a submission."""
