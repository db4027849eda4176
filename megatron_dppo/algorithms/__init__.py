"""The unified policy update (arXiv 2602.04879 v3, Eq. 23): divergences, masks, advantages, losses
and presets.

The modules compute with torch on per-token tensors of natural-log probabilities, and know no configuration
file, process group or model.
"""
