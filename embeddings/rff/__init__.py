"""Feature maps of item vectors: random Fourier features with advice and exports, the identity, the registry of kinds.

The exports are to safetensors and ONNX. Only ``torch_module`` imports torch. Other packages import
``RandomFourierFeatures`` from here.
"""

from typing import TYPE_CHECKING

from embeddings.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from embeddings.rff.features import DEFAULT_SIGMA as DEFAULT_SIGMA
    from embeddings.rff.features import RandomFourierFeatures as RandomFourierFeatures
    from embeddings.rff.features import digest as digest
    from embeddings.rff.frequencies import FREQUENCIES as FREQUENCIES

__getattr__ = lazy_exports(__name__)
