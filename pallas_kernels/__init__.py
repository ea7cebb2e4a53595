"""GPU operations of the packed forward, each behind one signature whatever implements it.

`kernels` names the implementation: `"xla"` is the plain reference that runs on every backend, `"pallas"` a kernel for
NVIDIA GPUs, `"interpret"` that kernel's code on the CPU.
"""

from pallas_kernels.head_statistics import HeadStatistics as HeadStatistics
from pallas_kernels.head_statistics import Noise as Noise
from pallas_kernels.head_statistics import head_statistics as head_statistics
from pallas_kernels.implementation import NAMES as NAMES
from pallas_kernels.implementation import XLA as XLA
from pallas_kernels.implementation import Implementation as Implementation
from pallas_kernels.implementation import Kernels as Kernels
from pallas_kernels.implementation import choose as choose
from pallas_kernels.matmul import gate_up_silu as gate_up_silu
from pallas_kernels.matmul import linear as linear
from pallas_kernels.matmul import linear_residual_norm as linear_residual_norm
from pallas_kernels.qkv_rope_cache import project_qkv as project_qkv
from pallas_kernels.qkv_rope_cache import qkv_rope_cache as qkv_rope_cache
from pallas_kernels.qkv_rope_cache import qkv_rope_cache_returning as qkv_rope_cache_returning
from pallas_kernels.qkv_rope_cache import rope as rope
from pallas_kernels.rms_norm import rms_norm as rms_norm
from pallas_kernels.scheduled_attention import scheduled_attention as scheduled_attention
from pallas_kernels.verify_attention import Visibility as Visibility
from pallas_kernels.verify_attention import verify_attention as verify_attention
