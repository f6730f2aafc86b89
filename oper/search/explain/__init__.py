"""What a plan says to people: summary, bottleneck, differences, what if, why nothing fits."""
