"""Models in files that transformers cannot both load and save: made into folders of safetensors, once.

gguf.py       any GGUF file
packaged.py   a real language model that a package of the registry carries
"""

from kvsketch.checkpoints.gguf import PRECISIONS, Imported, import_gguf
from kvsketch.checkpoints.packaged import SMOLLM2, smollm2_folder

__all__ = ["PRECISIONS", "SMOLLM2", "Imported", "import_gguf", "smollm2_folder"]
