"""The unified policy update (arXiv 2602.04879 v2, Eq. 23): divergences, masks, advantages, losses
and presets.

Pure torch on per-token tensors of natural-log probabilities: nothing here knows a configuration
file, a process group or a model.
"""
