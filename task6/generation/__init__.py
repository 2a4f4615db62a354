"""Generation at the memory's speed: the decoder beside task 6's readable model. See README.md."""

from task6.generation.config import CONFIGS, Config, find_config
from task6.generation.decoder import Decoder
from task6.generation.weights import Weights

__all__ = ["CONFIGS", "Config", "Decoder", "Weights", "find_config"]
