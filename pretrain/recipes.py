"""The recipes of this stage; they are written in `gatewright/megatron/recipes.py`.

(`tools.plan` reads them too, and no stage may import another.)
"""

from gatewright.megatron.recipes import RECIPES

__all__ = ["RECIPES"]
