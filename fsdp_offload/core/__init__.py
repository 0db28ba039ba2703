"""Ground floor: imports torch alone. Private torch API is touched here, and nowhere else."""
