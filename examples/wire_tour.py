"""Says which tinsmith this is."""

import tinsmith

print(f"tinsmith {tinsmith.__version__}")
