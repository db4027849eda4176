"""A run on one machine: the supervisor, which starts the engine and the trainer's ranks and ends them."""
