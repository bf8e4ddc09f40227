"""Values that all official configurations share."""

from easydict import EasyDict

from wan.configs import WAN_CONFIGS

_SHARED_KEYS = (
    *("t5_model", "t5_dtype", "text_len", "param_dtype", "num_train_timesteps", "sample_fps"),
    *("sample_neg_prompt", "frame_num"),
)
wan_shared_cfg = EasyDict({key: WAN_CONFIGS["t2v-A14B"][key] for key in _SHARED_KEYS})
