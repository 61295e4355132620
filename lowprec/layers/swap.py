"""Layers of a net whose place others take."""


def swapped(model, new):
    """Let new[layer] take the place of each of these layers of `model`, in place, under all of its names.

    Returns [(the module that holds it, its attribute there, the layer, what took its place)], a row a name.
    """
    places = []
    for name, layer in model.named_modules(remove_duplicate=False):
        if layer in new:
            parent, _, attribute = name.rpartition(".")
            places.append((model.get_submodule(parent), attribute, layer, new[layer]))
    for parent, attribute, _, low in places:
        setattr(parent, attribute, low)
    return places
