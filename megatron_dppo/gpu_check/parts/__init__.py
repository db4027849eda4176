"""The parts of the check, a module each; ``gpu_check.part`` says what one is."""
