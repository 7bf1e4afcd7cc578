"""The drafter: model, masks, anchors, noise, loss, acceptance."""
