"""The official configuration of t2v-A14B."""

from wan.configs import WAN_CONFIGS

t2v_A14B = WAN_CONFIGS["t2v-A14B"]
