"""From prompts to tokens: requests that join and leave one running batch, within a bounded memory."""
