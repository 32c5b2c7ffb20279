# table.R MEBIBYTES: a large table, of which the groups of one part after the other are averaged, a line for each.
size <- as.integer(commandArgs(trailingOnly = TRUE)[1])
set.seed(1)
rows <- size * 43690L # three columns of 8 bytes
table <- data.frame(group = as.numeric(sample.int(100L, rows, TRUE)), x = runif(rows), y = runif(rows))
part <- 0L
repeat {
  at <- seq.int((part * 200000L) %% (rows - 200000L) + 1L, length.out = 200000L)
  means <- tapply(table$x[at] * table$y[at], table$group[at], mean)
  cat(format(sum(means), digits = 15), "\n", sep = "")
  flush(stdout())
  part <- part + 1L
}
