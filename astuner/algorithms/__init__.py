"""Policy-gradient algorithms and supervised training as pure PyTorch functions: no model, no I/O.

With `algorithm = resolve(config)` and `rule = algorithm.rule`, a trainer does the following in a training step:

1.  Shape the rewards of all episodes: `overlong_punishment`, `token_kl` → `episode_sums` → `rewards_with_kl`.
2.  Compute `rule.advantages(rewards, group_ids)` over all episodes of the step; for an algorithm that normalises each
    component of the reward separately, `group_decoupled_advantages` of the components.
3.  For each mini-batch (one optimizer step; the samples of an episode stay together), compute `sample_scales` over all
    its samples.
4.  For each micro-batch of the mini-batch, compute `rule.policy_loss(PolicyBatch(…))` and `token_weights`, and
    back-propagate the sum of token losses × weights. The micro-batches' gradients add up to that of the loss.

Supervised training has no `rule`: in steps 3 and 4, `sft_token_weights` replaces the train counts and
`cross_entropy_losses` replaces the policy loss.
"""
