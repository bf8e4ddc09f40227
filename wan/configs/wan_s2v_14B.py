"""The official configuration of s2v-14B."""

from wan.configs import WAN_CONFIGS

s2v_14B = WAN_CONFIGS["s2v-14B"]
