"""MaxText's loader of safetensors, replaced by Weightbeam's.

import weightbeam.maxtext
weightbeam.maxtext.install()             # before MaxText's train.main, decode or sft
# source_checkpoint_layout=safetensors_dynamic load_parameters_path=hf://Qwen/Qwen3-8B
"""

from weightbeam.pipelines.loading.maxtext import install, load_safetensors_dynamic_state

__all__ = ["install", "load_safetensors_dynamic_state"]
