"""Making drafts for a target: the text it answers, the features it computes, the heads trained on both."""
