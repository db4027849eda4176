"""The parts of the check, a module each; ``gpu_check/__init__.py`` says what one is."""
