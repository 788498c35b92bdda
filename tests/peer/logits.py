"""Logits of a checkpoint as transformers computes them, in float32 on the CPU.

usage: python logits.py CHECKPOINT TOKENS.npy LOGITS.npy   (needs torch and transformers >= 5.17)

Fails if transformers finds a tensor missing, left over, or of another shape.
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

folder, tokens, out = sys.argv[1:]
model, report = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, output_loading_info=True
)
problems = {key: value for key, value in report.items() if value}
if problems:
    sys.exit(f"{folder}: {problems}")
with torch.no_grad():
    logits = model.eval()(torch.from_numpy(np.load(tokens)).long(), use_cache=False).logits
np.save(out, logits.numpy())
