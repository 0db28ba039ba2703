"""Ground floor: what every folder may import, and what imports torch alone."""
