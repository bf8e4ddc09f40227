"""What requests may say: fields, their JSON Schema, addresses, and how they are refused."""
