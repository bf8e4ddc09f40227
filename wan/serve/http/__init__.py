"""HTTP: the server, its routes and their answers."""
