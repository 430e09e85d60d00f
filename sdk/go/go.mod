module dsec/agent

go 1.19
