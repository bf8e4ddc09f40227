"""What clients learn about a job: the video object, server-sent events, webhooks."""
