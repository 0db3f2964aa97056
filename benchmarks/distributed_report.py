def page(*a):
    return ""


def plot(*a):
    pass
