"""The parts of the check, in one module for each subject; ``gpu_check/__init__.py`` defines a part."""
