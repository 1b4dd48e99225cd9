"""Any model, as it is: a tensor's name is the array's path, `model.norm.weight` becomes `params.params.model.norm.weight`.

For models that MaxText doesn't have, and for other users of JAX (docs/howto/jax.md). It is used where it is asked for, with `--family identity`; nothing
is stacked, scaled or renamed, and no axis has a logical name.
"""

from weightbeam.model_mappings.family import Family
from weightbeam.model_mappings.rules import rule, stack


def words(shape):
    """A word for each axis, by its place and its size: two may be equally long."""
    return {f"axis{place}_{size}": size for place, size in enumerate(shape)}


def stacks(c, layout):
    table = [rule(name.replace(".", "/"), name, " ".join(words(shape)), "") for name, shape in layout.shapes.items()]
    return [stack("", "", 0, table)]


FAMILY = Family(
    name="identity",
    models={},
    dims=lambda c, layout: {word: size for shape in layout.shapes.values() for word, size in words(shape).items()},
    stacks=stacks,
    drops=lambda c, layout: {},
    releases="any model, its tensors under their own names",
    layouts=("scanned", "unscanned"),
)
