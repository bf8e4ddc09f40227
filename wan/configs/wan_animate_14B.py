"""The official configuration of animate-14B."""

from wan.configs import WAN_CONFIGS

animate_14B = WAN_CONFIGS["animate-14B"]
