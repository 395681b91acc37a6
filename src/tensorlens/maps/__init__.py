"""Token maps: an operator collapsed to one number for each pair of output and input."""

# Each of these adds its rows to `METHODS`, which are shown in this order.
from tensorlens.maps import tensor_maps as tensor_maps

# isort: split
from tensorlens.maps import baselines as baselines
from tensorlens.maps import peers as peers
