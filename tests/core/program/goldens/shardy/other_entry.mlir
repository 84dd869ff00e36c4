// the only public function becomes @main; its own attributes are kept
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  func.func private @inner(%arg0: tensor<8xf32>) -> tensor<8xf32> {
    return %arg0 : tensor<8xf32>
  }
  func.func public @main(%arg0: tensor<8xf32> {my.note = "kept", sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> (tensor<8xf32> {my.number = 3 : i32, sdy.sharding = #sdy.sharding<@mesh, [{"y"}]>}) {
    %0 = call @inner(%arg0) : (tensor<8xf32>) -> tensor<8xf32>
    return %0 : tensor<8xf32>
  }
  func.func private @unused(%arg0: tensor<8xf32>) -> tensor<8xf32> {
    %0 = call @main(%arg0) : (tensor<8xf32>) -> tensor<8xf32>
    return %0 : tensor<8xf32>
  }
}
