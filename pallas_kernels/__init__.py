"""GPU operations of the packed forward, each behind one signature whatever implements it.

`kernels` names the implementation: `"xla"` is the plain reference that runs on every backend, `"auto"` the best one
available on the backend at hand.
"""

from pallas_kernels.implementation import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.implementation import Kernels as Kernels
from pallas_kernels.implementation import choose as choose
from pallas_kernels.qkv_rope_cache import qkv_rope_cache as qkv_rope_cache
from pallas_kernels.qkv_rope_cache import rope as rope
from pallas_kernels.scheduled_attention import scheduled_attention as scheduled_attention
