"""How much of a block's output the transcoder does not explain."""


def unexplained(y, y_hat):
    """Fraction of variance unexplained: 0 is perfect, 1 is as good as always answering with the mean."""
    l2_loss = (y - y_hat).pow(2).sum()
    total_variance = (y - y.mean(0)).pow(2).sum()
    return l2_loss / total_variance
