"""The divergence of the policy from its reference, estimated from the sampled tokens."""

from torch import Tensor


def k3(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """exp(x) - x - 1 with x = log pi_ref - log pi_theta: unbiased under pi_theta, never negative.

    Source: joschu.net/blog/kl-approx.html.
    """
    difference_N = reference_logprobs_N - logprobs_N
    return difference_N.exp() - difference_N - 1
