"""Ground floor: imports torch, and tqdm for a bar, but no other folder of this package. What is
private in FSDP2, DTensor and storages is touched in three of its files, and nowhere else."""
