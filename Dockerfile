# The demo on a CPU:  docker build -t oper . && docker run --rm oper
# Another command:    docker run --rm oper .venv/bin/oper doctor
FROM python:3.11-slim
RUN apt-get update \
  && apt-get install -y --no-install-recommends g++ make \
  && rm -rf /var/lib/apt/lists/*
WORKDIR /oper
COPY . .
RUN make setup
CMD ["make", "demo"]
